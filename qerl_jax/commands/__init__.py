"""The commands of `qerl`, a module each: its help, its arguments, and the function that carries it out."""
