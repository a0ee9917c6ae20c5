"""How the ranks of one group keep in step: ``channel`` decides who announces which burst when, by ``headers``."""
