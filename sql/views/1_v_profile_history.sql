-- Inputs are what the key was made of. A profile that was repeated under the same key has changed nothing.
create or replace view v_profile_history as
with one as (
    select
        profile_key,
        kind,
        arg_max(run_id, created_at_s) as run_id,
        try_cast(arg_max(inputs, created_at_s) as json) as inputs,
        arg_max(num_rows, created_at_s) as num_rows,
        arg_max(num_quarantined, created_at_s) as num_quarantined,
        min(created_at_s) as first_at_s,
        max(created_at_s) as created_at_s
    from profile_record
    group by profile_key, kind
),

placed as (
    select
        *,
        lag(inputs) over earlier as previous,
        lag(profile_key) over earlier as previous_key
    from one
    window earlier as (partition by kind order by first_at_s, profile_key)
)

select
    kind,
    profile_key,
    utc(first_at_s) as first_at,
    utc(created_at_s) as created_at,
    run_id,
    num_rows,
    num_quarantined,
    previous_key,
    array_to_string([
        concat(name, ': ', coalesce(previous ->> name, 'none'), ' -> ', coalesce(inputs ->> name, 'none'))
        for name in list_sort(list_distinct(json_keys(inputs) || json_keys(previous)))
        if (inputs ->> name) is distinct from (previous ->> name)
    ], '; ') as changed
from placed;

comment on view v_profile_history is
'Data and model profiles in the order in which they were first made, with what changed against the one before of the '
'same kind. Grain: one row per kind, profile_key.';
comment on column v_profile_history.profile_key is 'identity of the profile';
comment on column v_profile_history.kind is 'data or model';
comment on column v_profile_history.run_id is 'run that made it last';
comment on column v_profile_history.num_rows is 'samples or probes of the newest profile';
comment on column v_profile_history.num_quarantined is 'samples that it skipped';
comment on column v_profile_history.first_at is 'when it was first complete, UTC';
comment on column v_profile_history.created_at is 'when it was last complete, UTC';
comment on column v_profile_history.previous_key is 'profile of the same kind made before; null: the first';
comment on column v_profile_history.changed is
'inputs of the key that differ from the profile before: name: before -> after; null: the first';
