-- idle_tenants: strike off a pool's list those of these tenants for which nothing waits or runs in it.
-- needs: idle_tenant
local args = cjson.decode(ARGV[1])
for _, tenant in ipairs(args.tenants) do
  strike_if_idle(args.prefix, tenant)
end
