"""Finding a plan: every legal one, what each costs, which is best and why."""
