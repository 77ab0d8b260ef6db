"""What everything rests on: errors, settings, specs, files. Imports nothing else of Tilery."""
