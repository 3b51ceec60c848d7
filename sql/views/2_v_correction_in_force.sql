-- What was learnt with one tp or with recompute holds for the others: speeds differ, mistakes are much the same. A set
-- that corrects a table which was fitted anew since is left out: the fit has seen what it knows.
create or replace view v_correction_in_force as
with target as (
    select distinct
        table_id,
        module,
        profile_key,
        trains = 'none' as is_frozen
    from v_cost_table_latest
)

select
    target.profile_key,
    target.is_frozen,
    correction.*
from v_correction_latest as correction
inner join target on correction.table_id = target.table_id and correction.module = target.module
qualify
    rank() over (
        partition by target.profile_key, target.module, target.is_frozen
        order by
            correction.observed_at desc, correction.effective_step desc,
            correction.run_id desc, correction.table_id desc
    ) = 1;

comment on view v_correction_in_force is
'The newest set of corrections of every module of a model profile, for any tp and recompute setting. '
'Grain: profile_key, module, is_frozen, min_tokens. Ratios.';
comment on column v_correction_in_force.profile_key is 'model profile of the cost table';
comment on column v_correction_in_force.is_frozen is 'whether no weights of the module take gradients';
comment on column v_correction_in_force.table_id is 'cost table it was learned for';
comment on column v_correction_in_force.min_tokens is 'tokens of the smallest item it applies to';
comment on column v_correction_in_force.max_tokens is 'tokens from which on it no longer applies';
