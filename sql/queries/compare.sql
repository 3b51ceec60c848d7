-- purpose: step by step, the same global batch in arrival order and balanced, measured and predicted
-- parameters: $run_id varchar, the run (without /compare)
-- grain: one row per comparison step that ran under both policies
-- units: seconds; measured_speedup and predicted_speedup are ratios
with step as (
    select * from v_step
    where run_id = $run_id || '/compare'
)

select
    arrival.step,
    arrival.step_s as arrival_step_s,
    balanced.step_s as balanced_step_s,
    arrival.step_s / balanced.step_s as measured_speedup,
    arrival.predicted_step_s / balanced.predicted_step_s as predicted_speedup,
    arrival.loss as arrival_loss,
    balanced.loss as balanced_loss
from step as arrival
inner join step as balanced on arrival.attempt = balanced.attempt and arrival.step = balanced.step
where arrival.policy = 'arrival' and balanced.policy = 'balanced'
order by arrival.attempt, arrival.step;
