-- checkpoint_totals: count a tenant's checkpoints and their bytes, those not stored yet as well.
local sizes, owed = KEYS[1], KEYS[2]
local tenant = ARGV[1]

strike_expired(tenant)
local bytes = 0
for _, size in ipairs(redis.call('HVALS', sizes)) do
  bytes = bytes + tonumber(size)
end
return { redis.call('HLEN', sizes) + redis.call('SCARD', owed), bytes }
