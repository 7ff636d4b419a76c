//! Element-wise reduction, scaling and conversion.
