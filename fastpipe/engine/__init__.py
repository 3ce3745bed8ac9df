"""How work runs: threads, batch memory, what happens to bad samples, and time by stage."""
