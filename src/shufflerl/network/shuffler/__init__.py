"""The shuffler: knows who sent something but cannot read it; permutes, or adds up, whole batches."""
