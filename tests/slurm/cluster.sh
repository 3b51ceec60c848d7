#!/usr/bin/env bash
# A real four-node Slurm cluster on one machine, for tests.
#
#   cluster.sh up [--accounting]   install what is missing, start, wait until all nodes are idle
#   cluster.sh down                cancel every job, stop every daemon, remove every trace outside $ROOT
#   cluster.sh status              exit 0 when up
#   cluster.sh mend                start every slurmd that has crashed, wait until all nodes are idle
# and for tests of what goes wrong, on a cluster that is up:
#   cluster.sh accounting on|off   start or stop the database daemon and its database, and the controller anew
#   cluster.sh accounting kill     kill -9 both of them
#   cluster.sh controller kill|start
#
# One slurmd per node: same network, its own port and loopback address, and its own UTS namespace so that `hostname`
# differs (Debian builds Slurm with MULTIPLE_SLURMD). Each node has 4 CPUs that may not exist and 2 GPUs that do not:
# the device files are clones of /dev/null, enough for Slurm to set CUDA_VISIBLE_DEVICES. Memory limits are not
# enforced (no cgroups). Needs root, or CAP_SYS_ADMIN for unshare. Warm start about 2 s, 20 s more to install packages.
set -euo pipefail

ROOT=${DFLOP_SLURM_ROOT:-/var/tmp/dflop-slurm}
NODES=4
HOSTS_MARK="# dflop test cluster"
CONF_FILES=(slurm.conf gres.conf cgroup.conf slurmdbd.conf)

say() { echo "cluster: $*" >&2; }
die() { say "$*"; exit 1; }

wait_for() { # wait_for SECONDS WHAT COMMAND...: polls until COMMAND succeeds
    local limit=$((SECONDS + $1)) what=$2
    shift 2
    until "$@" >/dev/null 2>&1; do
        ((SECONDS < limit)) || die "gave up waiting for $what; logs are in $ROOT/log"
        sleep 0.1
    done
}

install_packages() { # install_packages COMMAND PACKAGE...: does nothing when COMMAND is there
    command -v "$1" >/dev/null && return
    shift
    say "installing $*"
    local policy=/usr/sbin/policy-rc.d made=
    # Without this Debian starts every daemon as soon as it is unpacked.
    if [[ ! -e $policy ]]; then printf '#!/bin/sh\nexit 101\n' >$policy; chmod +x $policy; made=1; fi
    export DEBIAN_FRONTEND=noninteractive
    { apt-get update -qq && apt-get install -y -qq --no-install-recommends "$@"; } >"$ROOT/log/apt.log" 2>&1 ||
        die "apt-get install failed: see $ROOT/log/apt.log"
    [[ -z $made ]] || rm $policy
}

write_config() { # write_config ACCOUNTING(0|1)
    local accounting="AccountingStorageType=accounting_storage/none"
    if (($1)); then
        accounting=$'AccountingStorageType=accounting_storage/slurmdbd\nAccountingStorageHost=localhost'
        accounting+=$'\nAccountingStoragePort=16819\nAccountingStorageTRES=gres/gpu'
    fi
    cat >"$ROOT/slurm.conf" <<CONF
ClusterName=dflop
SlurmctldHost=$(hostname)(127.0.0.1)
SlurmctldPort=16817
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A requeued job waits this long in PENDING(BeginTime); the default is 120 s.
AuthInfo=cred_expire=5
StateSaveLocation=$ROOT/state
SlurmdSpoolDir=$ROOT/spool/%n
SlurmctldPidFile=$ROOT/run/slurmctld.pid
SlurmdPidFile=$ROOT/run/slurmd.%n.pid
SlurmctldLogFile=$ROOT/log/slurmctld.log
SlurmdLogFile=$ROOT/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=5,sched_interval=5,batch_sched_delay=0,sched_min_interval=100000
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
# Lets nodes claim more CPUs than the machine has.
SlurmdParameters=config_overrides
SlurmctldParameters=preempt_send_user_signal
GresTypes=gpu
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=2
JobCompType=jobcomp/filetxt
JobCompLoc=$ROOT/log/jobcomp.txt
JobRequeue=1
MinJobAge=300
KillWait=5
InactiveLimit=0
SlurmctldTimeout=30
SlurmdTimeout=60
MessageTimeout=30
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
MaxArraySize=1001
$accounting
NodeName=node[1-$NODES] NodeHostname=node[1-$NODES] NodeAddr=127.0.1.1[1-$NODES] Port=[17001-1700$NODES] CPUs=4 Boards=1 SocketsPerBoard=1 CoresPerSocket=4 ThreadsPerCore=1 RealMemory=6000 Gres=gpu:fake:2 State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE DefMemPerCPU=500 PriorityTier=10 State=UP
PartitionName=low Nodes=ALL MaxTime=INFINITE DefMemPerCPU=500 PriorityTier=1 PreemptMode=REQUEUE GraceTime=15 State=UP
CONF
    echo "NodeName=node[1-$NODES] Name=gpu Type=fake File=$ROOT/dev/fakegpu[0-1]" >"$ROOT/gres.conf"
    printf '%s\n' CgroupPlugin=cgroup/v1 ConstrainCores=no ConstrainDevices=no ConstrainRAMSpace=no >"$ROOT/cgroup.conf"
    (umask 077; cat >"$ROOT/slurmdbd.conf" <<CONF
AuthType=auth/munge
DbdHost=localhost
DbdPort=16819
SlurmUser=root
PidFile=$ROOT/run/slurmdbd.pid
LogFile=$ROOT/log/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort=13306
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct
CONF
    )
    for gpu in 0 1; do
        [[ -c $ROOT/dev/fakegpu$gpu ]] || mknod -m 666 "$ROOT/dev/fakegpu$gpu" c 1 3
    done
}

register_names() { # hosts entries for the nodes, and links so that SLURM_CONF is not needed
    mkdir -p /etc/slurm
    for file in "${CONF_FILES[@]}"; do
        [[ ! -e /etc/slurm/$file || $(readlink "/etc/slurm/$file") == "$ROOT/$file" ]] ||
            die "/etc/slurm/$file is not ours: this machine belongs to another Slurm"
        ln -sfn "$ROOT/$file" "/etc/slurm/$file"
    done
    grep -q "$HOSTS_MARK" /etc/hosts && return
    for ((i = 1; i <= NODES; i++)); do echo "127.0.1.1$i node$i $HOSTS_MARK" >>/etc/hosts; done
}

start_munge() {
    if [[ ! -e /etc/munge/munge.key ]]; then
        (umask 077; head -c 1024 /dev/urandom >/etc/munge/munge.key)
        chown munge:munge /etc/munge/munge.key
    fi
    install -d -o munge -g munge -m 755 /run/munge
    munge -n >/dev/null 2>&1 || runuser -u munge -- /usr/sbin/munged --force # a killed one leaves its socket
    wait_for 10 munged munge -n
}

start_accounting() {
    local data=$ROOT/mysql socket=$ROOT/run/mysql.sock
    install -d -o mysql -g mysql "$data"
    [[ -d $data/mysql ]] || mariadb-install-db --user=mysql --datadir="$data" --skip-test-db >"$ROOT/log/mariadb.log" 2>&1
    setsid mariadbd --no-defaults --user=mysql --datadir="$data" --socket="$socket" --pid-file="$data/mariadbd.pid" \
        --bind-address=127.0.0.1 --port=13306 --innodb-buffer-pool-size=64M --innodb-lock-wait-timeout=900 \
        --innodb-log-file-size=64M --innodb-flush-log-at-trx-commit=2 >>"$ROOT/log/mariadb.log" 2>&1 </dev/null &
    # The data directory's owner makes the socket, so it cannot live in $ROOT/run unless mysql may write there.
    wait_for 30 mariadbd mariadb --no-defaults --socket="$socket" -e 'select 1'
    mariadb --no-defaults --socket="$socket" <<'SQL'
create database if not exists slurm_acct;
create user if not exists slurm@'127.0.0.1' identified by 'slurm';
create user if not exists slurm@localhost identified by 'slurm';
grant all on slurm_acct.* to slurm@'127.0.0.1';
grant all on slurm_acct.* to slurm@localhost;
SQL
    slurmdbd
    wait_for 30 slurmdbd sacctmgr -n list cluster
    sacctmgr -n list cluster | grep -q dflop || sacctmgr -i add cluster dflop >/dev/null
}

is_pinged() { [[ $(scontrol ping 2>/dev/null) == *"is UP"* ]]; }

all_idle() {
    [[ $(sinfo -h -p debug -t idle -o %D 2>/dev/null) == "$NODES" ]] && return
    scontrol update "nodename=node[1-$NODES]" state=resume 2>/dev/null # a node marked down stays so without this
    return 1
}

is_alive() { # is_alive PID: it exists and is no zombie (init may be slow to reap)
    local state
    state=$(ps -o stat= -p "$1") && [[ $state != Z* ]]
}

is_running() { # is_running PIDFILE: the process named there is alive
    local pid
    pid=$(cat "$1" 2>/dev/null) && [[ -n $pid ]] && is_alive "$pid"
}

stop() { # stop PIDFILE [SECONDS]: TERM, then KILL after 10 s
    is_running "$1" || { rm -f "$1"; return 0; }
    local pid limit=$((SECONDS + ${2:-10}))
    pid=$(cat "$1")
    kill "$pid" 2>/dev/null || true
    while is_alive "$pid"; do
        ((SECONDS < limit)) || kill -9 "$pid" 2>/dev/null || true
        sleep 0.1
    done
    rm -f "$1"
}

up() {
    local accounting=0
    [[ ${1:-} == --accounting ]] && accounting=1
    status >/dev/null && { say "already up"; return; }
    ((EUID == 0)) || die "needs root (slurmd, unshare --uts)"
    mkdir -p "$ROOT"/{state,spool,run,log,dev}
    chmod 1777 "$ROOT/run"
    install_packages slurmctld slurm-wlm munge
    ((accounting)) && { install_packages slurmdbd slurmdbd; install_packages mariadbd mariadb-server; }
    write_config "$accounting"
    register_names
    start_munge
    ((accounting)) && start_accounting
    start_controller
    for ((i = 1; i <= NODES; i++)); do
        start_node "$i"
    done
    wait_for 60 "$NODES idle nodes" all_idle
    say "up: $NODES nodes, accounting $( ((accounting)) && echo on || echo off), files in $ROOT"
}

start_node() { # start_node NUMBER
    mkdir -p "$ROOT/spool/node$1"
    unshare --uts sh -c "hostname node$1; exec slurmd -N node$1 -f $ROOT/slurm.conf"
}

mend() {
    local i
    for ((i = 1; i <= NODES; i++)); do
        is_running "$ROOT/run/slurmd.node$i.pid" && continue
        say "slurmd of node$i is not there; started"
        start_node "$i"
    done
    wait_for 60 "$NODES idle nodes" all_idle
}

start_controller() {
    slurmctld -f "$ROOT/slurm.conf"
    wait_for 30 slurmctld is_pinged
}

controller() { # controller kill|start
    case ${1:-} in
    kill) kill -9 "$(cat "$ROOT/run/slurmctld.pid")"; rm "$ROOT/run/slurmctld.pid" ;;
    start) start_controller ;;
    *) die "usage: $0 controller kill|start" ;;
    esac
}

accounting() { # accounting on|off|kill
    case ${1:-} in
    on)
        install_packages slurmdbd slurmdbd
        install_packages mariadbd mariadb-server
        write_config 1
        start_accounting
        ;;
    off)
        write_config 0
        stop "$ROOT/run/slurmdbd.pid"
        stop "$ROOT/mysql/mariadbd.pid"
        ;;
    kill)
        kill -9 "$(cat "$ROOT/run/slurmdbd.pid")" "$(cat "$ROOT/mysql/mariadbd.pid")"
        rm -f "$ROOT/run/slurmdbd.pid" "$ROOT/mysql/mariadbd.pid"
        return
        ;;
    *) die "usage: $0 accounting on|off|kill" ;;
    esac
    stop "$ROOT/run/slurmctld.pid" # it reads where its accounts are when it starts
    start_controller
    wait_for 60 "$NODES idle nodes" all_idle
}

down() {
    if is_running "$ROOT/run/slurmctld.pid"; then
        squeue -h -o %A | sort -u | xargs -r scancel 2>/dev/null || true
        # A slurmd told to stop leaves the steps of running jobs alive, so wait for the queue to drain first.
        local limit=$((SECONDS + 20))
        while [[ -n $(squeue -h 2>/dev/null) ]] && ((SECONDS < limit)); do sleep 0.2; done
    fi
    # All are asked before any is waited for: each takes a few seconds.
    cat "$ROOT"/run/slurm*.pid 2>/dev/null | xargs -r kill 2>/dev/null || true
    for ((i = 1; i <= NODES; i++)); do stop "$ROOT/run/slurmd.node$i.pid"; done
    stop "$ROOT/run/slurmctld.pid"
    stop "$ROOT/run/slurmdbd.pid"
    stop "$ROOT/mysql/mariadbd.pid"
    stop /run/munge/munged.pid 1 # by itself it takes 10 s
    for file in "${CONF_FILES[@]}"; do
        [[ $(readlink "/etc/slurm/$file") != "$ROOT/$file" ]] || rm "/etc/slurm/$file"
    done
    # In a container /etc/hosts is a mount: rewrite it in place, `sed -i` would try to rename over it.
    local hosts
    hosts=$(grep -v "$HOSTS_MARK" /etc/hosts || true)
    printf '%s\n' "$hosts" >/etc/hosts
    say "down"
}

status() {
    is_running "$ROOT/run/slurmctld.pid" && is_pinged || { echo "down"; return 1; }
    sinfo -N -o "%N %T"
}

case ${1:-} in
up | down | status | mend | accounting | controller) "$@" ;;
*) die "usage: $0 up [--accounting] | down | status | mend | accounting on|off|kill | controller kill|start" ;;
esac
