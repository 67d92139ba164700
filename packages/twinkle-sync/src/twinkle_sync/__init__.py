"""Verified, versioned weight transfer from trainers to samplers."""
