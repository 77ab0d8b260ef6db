from tilery.cli import main

main()
