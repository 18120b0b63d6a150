-- checkpoint_totals: count a tenant's checkpoints and their bytes, those not stored yet as well.
-- needs: checkpoint_index
local sizes, unstored = unpack(KEYS)
local args = cjson.decode(ARGV[1])

strike_expired(args.tenant)
local bytes = 0
for _, size in ipairs(redis.call('HVALS', sizes)) do
  bytes = bytes + tonumber(size)
end
return { redis.call('HLEN', sizes) + redis.call('SCARD', unstored), bytes }
