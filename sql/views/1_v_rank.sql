create or replace view v_rank as
select
    *,
    measured_s / nullif(predicted_s, 0) as measured_to_predicted
from rank_rollup;

comment on view v_rank is
'Speed of every rank relative to its peers (peer_group). Grain: run_id, attempt, rank. slowdown 1.1: 10 % slower.';
comment on column v_rank.measured_to_predicted is 'measured over predicted seconds, ratio';
