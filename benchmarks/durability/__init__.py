"""The parts of the durability benchmark."""
