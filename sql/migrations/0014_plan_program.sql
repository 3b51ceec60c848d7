-- What is proven of plans, beside the plans themselves.

create table plan_program (
    run_id varchar not null,
    plan_id varchar not null,
    num_microbatches bigint not null,
    num_columns bigint not null,
    num_columns_left bigint not null,
    incumbent_s double not null,
    objective_s double not null,
    bound_s double not null,
    gap_frac double not null,
    status varchar not null,
    process_price_s double not null,
    _run_id varchar not null,
    _producer varchar not null,
    _seq bigint not null
);

comment on table plan_program is
'What a program proves of plans with one number of microbatches whose modules have processes of their own; proven of '
'the planning formula, never of simulated steps.';
comment on column plan_program.run_id is 'run';
comment on column plan_program.plan_id is
'plan that the search came to, whatever its layout and number of microbatches';
comment on column plan_program.num_microbatches is 'microbatches per step';
comment on column plan_program.num_columns is 'layouts of all modules that fit in memory';
comment on column plan_program.num_columns_left is 'those that bounds leave, which are the binaries of the program';
comment on column plan_program.incumbent_s is
'formula value of the best plan known before, seconds; infinite where there was none';
comment on column plan_program.objective_s is
'formula value of the best plan found, seconds; infinite where there is none';
comment on column plan_program.bound_s is 'no plan has a smaller formula value, seconds';
comment on column plan_program.gap_frac is 'by how much a better plan could be, a part of objective_s';
comment on column plan_program.status is
'optimal: proven the best; node limit: stopped before; bounded: none is near the best plan of any kind, so there was '
'nothing to solve for; infeasible: none fits';
comment on column plan_program.process_price_s is
'formula seconds that one process more saves in the relaxed program; NaN but for the best number of microbatches';
comment on column plan_program._run_id is 'run of the spool file the row came from';
comment on column plan_program._producer is 'producer of the spool file the row came from';
comment on column plan_program._seq is 'number of the spool file within its producer';
