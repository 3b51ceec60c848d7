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
    utc(decision.observed_at_s) as observed_at
from decision
left join v_plan as ran on decision.run_id = ran.run_id and decision.plan_id = ran.plan_id
left join v_plan as next_plan
    on decision.run_id = next_plan.run_id and decision.new_plan_id = next_plan.plan_id;

comment on view v_decision is
'What runs noticed about their own speed and did about it, with the plans in words; null: not measured, not reckoned. '
'Grain: one row per decision. gain_s over the steps that are left and cost_s: seconds.';
comment on column v_decision.measured is
'what was measured, in the units that detail names; null: nothing to measure';
comment on column v_decision.expected is 'what was expected, in the same units; null: nothing';
comment on column v_decision.gain_s is 'expected gain over the steps that are left, seconds; null: not reckoned';
comment on column v_decision.cost_s is 'what acting costs, seconds; null: not reckoned';
comment on column v_decision.layout_text is 'layout of the plan that ran, in words';
comment on column v_decision.new_plan_id is 'plan that runs from now on, or would; null: none was looked for';
comment on column v_decision.new_layout_text is 'layout of that plan, in words';
