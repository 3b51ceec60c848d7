-- What a plan's layout is, its grids say: modules with the same first rank.
alter table plan drop column layout;
