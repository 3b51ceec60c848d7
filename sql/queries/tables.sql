-- purpose: all tables, views and macros, with their contents
-- parameters: none
-- grain: one row per table, view or macro
-- units: none
-- noqa: disable=RF04
select
    'view' as what,
    view_name as relation,
    comment
from duckdb_views()
where not internal
union all
select
    'table' as what,
    table_name as relation,
    comment
from duckdb_tables()
union all
select
    'macro' as what,
    format('{}({})', function_name, array_to_string(parameters, ', ')) as relation,
    comment
from duckdb_functions()
where not internal and function_type in ('macro', 'table_macro')
order by what desc, relation asc;
