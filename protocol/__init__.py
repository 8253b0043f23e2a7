"""The rules of a round, without input or output, and the simulator that tests them."""
