"""`rlx doctor`: what rlx finds on this machine, what it uses of it, and what keeps it from running well."""
