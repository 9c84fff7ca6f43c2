"""How a model is split over devices and how much memory that takes; later also how fast it will be."""
