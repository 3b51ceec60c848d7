create or replace view v_slow_rank as
select
    run_id,
    attempt,
    rank, -- noqa: RF04
    module,
    stage,
    dp_rank,
    host,
    factor,
    sd_frac,
    factor > 1.05 and factor - 2 * sd_frac > 1 as is_slow,
    is_in_force,
    effective_step,
    utc(observed_at_s) as observed_at
from rank_factor
qualify
    row_number() over (
        partition by run_id, attempt, rank
        order by observed_at_s desc, effective_step desc, _producer desc, _seq desc, rowid desc
    ) = 1;

comment on view v_slow_rank is
'The newest factor of every rank relative to its peers; is_slow: more than 5 % and two standard deviations slower. '
'Grain: one row per run_id, attempt, rank. Ratios.';
comment on column v_slow_rank.is_slow is
'whether it takes more than 5 % and than two standard deviations longer than its peers';
