"""How weights move: the update, its rate, and the one judgement of a step's gradient."""
