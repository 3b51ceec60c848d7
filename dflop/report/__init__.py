"""Values of a run -> tables, plots and one HTML file. Callers read the store and pass records in."""
