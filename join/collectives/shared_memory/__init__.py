"""Control lines between the ranks of one machine, through memory that they share: the lines, and the memory itself."""
