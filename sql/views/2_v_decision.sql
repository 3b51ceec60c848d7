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
'Drifts, slow ranks and re-planning decisions, with layouts in words; null: not measured or estimated. '
'Grain: one row per decision. gain_s over the remaining steps and cost_s: seconds.';
comment on column v_decision.measured is
'measured value, in the units named in detail; null: none';
comment on column v_decision.expected is 'expected value, in the same units; null: none';
comment on column v_decision.gain_s is 'expected gain over the remaining steps, seconds; null: not estimated';
comment on column v_decision.cost_s is 'cost of acting, seconds; null: not estimated';
comment on column v_decision.layout_text is 'layout of the plan that ran, in words';
comment on column v_decision.new_plan_id is 'plan to run from now on, if adopted; null: no search';
comment on column v_decision.new_layout_text is 'layout of that plan, in words';
