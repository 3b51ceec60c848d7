-- Whether factors by size pay is no reading any more: deviations are shrunk by what chance would give.

drop view if exists v_gate;
drop table gate_reading;
