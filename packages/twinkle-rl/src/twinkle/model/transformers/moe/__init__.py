"""Mixture-of-experts models with TransformersModel, under the documented names."""
