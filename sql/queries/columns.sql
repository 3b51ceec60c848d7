-- purpose: the columns of a table or view, with meaning and unit
-- parameters: $relation varchar, name of a table or view
-- grain: one row per column, in order
-- units: none
select
    column_name,
    data_type,
    comment
from duckdb_columns()
where table_name = $relation
order by column_index;
