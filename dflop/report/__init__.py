"""Values of a run -> tables, plots and one HTML file. Nothing here opens the store: callers read and pass records in."""
