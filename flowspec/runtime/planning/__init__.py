"""Planning for a cluster that is there: asks its devices how they are, and has `plan` decide what runs
where."""
