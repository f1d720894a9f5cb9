from meshwright.cli.main import main

raise SystemExit(main())
