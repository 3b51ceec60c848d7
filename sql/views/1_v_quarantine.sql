create or replace view v_quarantine as
select
    'sample' as what,
    _run_id as run_id,
    format('{}#{}', profile_key, sample_index) as subject,
    path,
    format('{}: {}', phase, reason) as reason
from quarantined_sample
qualify
    row_number() over (
        partition by profile_key, sample_index, phase
        order by _run_id, _producer, _seq, rowid
    ) = 1
union all by name
select
    'file' as what,
    split_part(path, '/', 2) as run_id,
    parse_filename(path) as subject,
    path,
    reason
from file_quarantine;

comment on view v_quarantine is
'Skipped samples and rejected files, with reasons. '
'Grain: one row per sample and phase, and one per rejected spool file.';
comment on column v_quarantine.what is 'sample or file';
comment on column v_quarantine.run_id is 'run that found it';
comment on column v_quarantine.subject is '<profile_key>#<sample_index> of a sample, name of a spool file';
comment on column v_quarantine.path is
'media file, relative to the media root, or path of the spool file below spool/';
comment on column v_quarantine.reason is 'reason; of a sample after its phase: profile or train';
