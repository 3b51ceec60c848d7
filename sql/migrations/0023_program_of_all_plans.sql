-- Programs hold chains of stages for all modules, too, so their bounds are of all plans.

comment on table plan_program is
'Bounds that a program proves for all plans with one number of microbatches; proven for the planning formula, not for '
'simulated steps. Rows of runs before this migration are of plans with dedicated ranks per module alone.';
comment on column plan_program.num_columns is
'grids of single modules that fit in memory, and the best chains of stages that hold all modules';
comment on column plan_program.status is
'optimal: proven the best; node limit: stopped before; bounded: none is near the best plan, so there was nothing to '
'solve for; infeasible: none fits';
