"""What is behind ``Join.iterate``: reading ahead, telling who has how many batches, dummies for ranks without any."""
