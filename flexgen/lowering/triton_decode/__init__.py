"""The decode backend: few queries, whose keys are split over programs."""
