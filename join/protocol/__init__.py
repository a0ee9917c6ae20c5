"""Protocol of one process group: ``channel`` decides which rank announces which burst when, in ``headers``."""
