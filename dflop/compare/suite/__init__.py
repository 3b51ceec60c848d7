"""`dflop compare --suite`: what plans and policies would do on published configurations. Everything is simulated."""
