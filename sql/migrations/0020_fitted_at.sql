-- When a fit was made: what a module or a link costs has a history.

alter table cost_table add column fitted_at_s double default 0;
alter table link_cost add column fitted_at_s double default 0;

comment on column cost_table.fitted_at_s is
'Unix time of the fit, seconds; 0 in rows from before it was recorded. v_cost_history has a time for all';
comment on column link_cost.fitted_at_s is 'Unix time of the fit, seconds; 0 in rows from before it was recorded';
