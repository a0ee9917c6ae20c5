"""What ``python -m joinables`` can do: ``doctor``, and what it is made of."""
