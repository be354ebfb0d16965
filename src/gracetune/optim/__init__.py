"""Update rules and learning-rate schedules."""
