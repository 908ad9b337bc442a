"""Pictures of boards: tiles drawn in code with numpy alone; knows no game, needs no display."""
