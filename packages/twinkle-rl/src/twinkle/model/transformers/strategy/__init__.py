"""How TransformersModel divides its work, under the documented names."""
