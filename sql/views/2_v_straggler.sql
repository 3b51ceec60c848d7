-- 5 % and 3 steps: below, the spread of healthy devices and the noise of a median. Where peer_group is module, a stage
-- whose cost is predicted too low looks slow, too.
create or replace view v_straggler as
select *
from v_rank
where slowdown > 1.05 and num_peers > 1 and num_steps >= 3;

comment on view v_straggler is
'Processes more than 5 % slower than the median of their peers over 3 steps or more. Grain: run_id, attempt, rank.';
