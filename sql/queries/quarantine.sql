-- purpose: skipped samples and rejected files, grouped by reason, with an example of each
-- parameters: none
-- grain: one row per kind of thing and reason, most frequent first
-- units: counts
select
    what,
    regexp_replace(reason, '[0-9a-f]{12,}|[0-9]+', '#', 'g') as reason,
    count(*) as num_left_out,
    count(distinct run_id) as num_runs,
    min(path) as example
from v_quarantine
group by all
order by num_left_out desc, what asc, reason asc;
