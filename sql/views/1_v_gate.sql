create or replace view v_gate as
select
    run_id,
    attempt,
    step,
    is_on,
    is_on != lag(is_on, 1, false) over earlier as is_switch,
    gain_frac,
    mean_gain_frac,
    stderr_frac,
    cost_frac,
    (mean_gain_frac - cost_frac) / nullif(stderr_frac, 0) as num_stderrs,
    num_readings,
    utc(observed_at_s) as observed_at
from gate_reading
window earlier as (
    partition by run_id
    order by observed_at_s, attempt, step, _producer, _seq, rowid
);

comment on view v_gate is
'Readings of the gate for factors by size; is_switch: it was turned on or off by this one; num_stderrs: how '
'far the mean gain is above the cost. Grain: one row per run_id, attempt, step. Shares of a step.';
comment on column v_gate.is_switch is 'whether this reading turned it on or off';
comment on column v_gate.num_stderrs is 'how far the mean gain is above the cost, in standard errors';
