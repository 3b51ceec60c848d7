-- Profiles time copies between GPUs and their host.
comment on table link_measurement is
'One timed message or collective between processes, or copy of all GPUs of a node to and from the host.';
comment on column link_measurement.op is 'p2p, all_reduce, all_gather or host_copy';
comment on column link_cost.op is 'p2p, all_reduce, all_gather or host_copy';
