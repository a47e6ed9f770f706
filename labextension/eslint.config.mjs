import tseslint from 'typescript-eslint';

export default tseslint.config(
  { ignores: ['build', 'lib', 'node_modules', '*.mjs', 'style'] },
  tseslint.configs.strictTypeChecked,
  {
    languageOptions: {
      parserOptions: { project: ['tsconfig.json', 'tsconfig.test.json'] }
    },
    rules: {
      '@typescript-eslint/naming-convention': [
        'error',
        { selector: 'interface', format: ['PascalCase'], prefix: ['I'] }
      ],
      '@typescript-eslint/restrict-template-expressions': [
        'error',
        { allowNumber: true }
      ],
      // Lumino's `connect(slot, this)` binds by its second argument.
      '@typescript-eslint/unbound-method': 'off',
      curly: ['error', 'all'],
      eqeqeq: 'error'
    }
  }
);
