create or replace view v_decision as
select
    decision.run_id,
    decision.attempt,
    decision.step,
    decision.kind,
    decision.subject,
    decision.verdict,
    nullif(decision.measured, 'nan'::double) as measured,
    nullif(decision.expected, 'nan'::double) as expected,
    nullif(decision.gain_s, 'nan'::double) as gain_s,
    nullif(decision.cost_s, 'nan'::double) as cost_s,
    decision.num_steps_left,
    decision.plan_id,
    ran.layout_text,
    nullif(decision.new_plan_id, '') as new_plan_id,
    next_plan.layout_text as new_layout_text,
    decision.detail,
    decision.observed_at_s
from decision
left join v_plan as ran on decision.run_id = ran.run_id and decision.plan_id = ran.plan_id
left join v_plan as next_plan
    on decision.run_id = next_plan.run_id and decision.new_plan_id = next_plan.plan_id;

comment on view v_decision is
'What runs noticed about their own speed and did about it, with the plans in words; null: not measured, not reckoned. '
'Grain: one row per decision. gain_s over the steps that are left and cost_s: seconds.';
