"""The balanced trainer inside programs that make their trainers themselves, by the hooks that these have."""
