"""What a fit resumes from (``snapshot``), and the files that hold it (``file``)."""
