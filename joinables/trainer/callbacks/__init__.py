"""What can be hooked into a run, and the callbacks that come with the trainer."""
