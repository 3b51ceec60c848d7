-- purpose: skipped samples and rejected files, grouped by reason, with an example of each
-- parameters: none
-- grain: one row per kind of thing and reason, most frequent first
-- units: counts
select
    what,
    regexp_replace(reason, '[0-9a-f]{12,}|[0-9]+', '#', 'g') as reason,
    count(*) as num_skipped,
    count(distinct run_id) as num_runs,
    min_by(subject, row(path, subject)) as example,
    min_by(v_quarantine.reason, row(path, subject)) as example_reason,
    nullif(min(path), '') as example_path
from v_quarantine
group by what, regexp_replace(reason, '[0-9a-f]{12,}|[0-9]+', '#', 'g')
order by num_skipped desc, what asc, reason asc;
